"""Uploads: changes to a client's update before it is sent, with the base class of attacks and privacy; nothing that a
server does.
"""

from flsv.uploads.base import Upload, UploadContext, check_order, sanitize_report, upload
from flsv.uploads.compression import Compression
from flsv.uploads.quantized import Quantized
from flsv.uploads.top_k import TopK

__all__ = ["Compression", "Quantized", "TopK", "Upload", "UploadContext", "check_order", "sanitize_report", "upload"]
