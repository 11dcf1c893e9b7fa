from .contribution_metrics import ContributionMetrics as ContributionMetrics
from .round_server import RoundServer as RoundServer
