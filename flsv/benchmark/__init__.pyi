from .built_in import Duplicates as Duplicates
from .federation import Federation as Federation, federation as federation, names as names
from .scores import share_error as share_error
from .truth import (
    Truth as Truth,
    make_truth as make_truth,
    train_coalitions as train_coalitions,
    truth_table as truth_table,
)
