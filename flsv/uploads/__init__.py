"""Uploads: changes that a client makes to its update before it sends it. Attacks and privacy are uploads, too."""

from flsv.uploads.base import Upload, UploadContext, check_order, sanitize_report, upload
from flsv.uploads.compression import Compression, TopK

__all__ = ["Compression", "TopK", "Upload", "UploadContext", "check_order", "sanitize_report", "upload"]
