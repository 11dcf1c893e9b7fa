"""What happens to a client's update before it leaves: the common base of attacks and privacy, and compression."""

from flsv.uploads.base import Departure, Upload, told, upload
from flsv.uploads.compression import Compression, Quantized, TopK

__all__ = ["Compression", "Departure", "Quantized", "TopK", "Upload", "told", "upload"]
