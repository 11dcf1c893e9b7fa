from .client_functions import (
    SampleValues as SampleValues,
    flag_samples as flag_samples,
    sample_values as sample_values,
    write_flagged as write_flagged,
)
from .fedbary import (
    FedBary as FedBary,
    Valuation as Valuation,
    clients_of as clients_of,
    participants_of as participants_of,
    server_of as server_of,
)
