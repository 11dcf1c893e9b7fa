from .folds import MovingAverage as MovingAverage, Sum as Sum
from .method_folds import Decay as Decay, SurrogateAverage as SurrogateAverage
