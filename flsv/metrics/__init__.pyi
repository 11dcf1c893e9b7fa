from .base import ContributionMetric as ContributionMetric
from .class_specific_shapley import ClassSpecificShapley as ClassSpecificShapley
from .coalitions.blended_contribution import BlendedContribution as BlendedContribution
from .coalitions.one_round_shapley import OneRoundShapley as OneRoundShapley
from .coalitions.presets import (
    CumulativeShapley as CumulativeShapley,
    DecayedShapley as DecayedShapley,
    LeaveOneOut as LeaveOneOut,
    PartialFederatedShapley as PartialFederatedShapley,
    SurrogateFederatedShapley as SurrogateFederatedShapley,
)
from .coalitions.value import CoalitionValue as CoalitionValue
from .contribution_estimation import ContributionEstimation as ContributionEstimation
from .cosine_gradient_shapley import CosineGradientShapley as CosineGradientShapley
from .costs import CommunicationCost as CommunicationCost, PrivacyLoss as PrivacyLoss
from .domain_relevance import DomainRelevance as DomainRelevance
from .fedbary import (
    CalibratedOTGradient as CalibratedOTGradient,
    WassersteinContribution as WassersteinContribution,
)
from .gradient_agreement import GradientAgreement as GradientAgreement
from .gradient_shapley import GradientShapley as GradientShapley
from .shadow import ShadowShapley as ShadowShapley
