from .base import (
    JointUpload as JointUpload,
    PrivateUpload as PrivateUpload,
    Upload as Upload,
    UploadContext as UploadContext,
    check_uploads as check_uploads,
    sanitize_report as sanitize_report,
    upload as upload,
)
from .compression import Compression as Compression, TopK as TopK
