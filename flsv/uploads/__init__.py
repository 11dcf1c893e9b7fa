"""Uploads: changes to a client's update before it is sent. The base of attacks, privacy and compression."""

from flsv.uploads.base import (
    Compression,
    Quantized,
    TopK,
    Upload,
    UploadContext,
    check_order,
    sanitize_report,
    upload,
)

__all__ = ["Compression", "Quantized", "TopK", "Upload", "UploadContext", "check_order", "sanitize_report", "upload"]
