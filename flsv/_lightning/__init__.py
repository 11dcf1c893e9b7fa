"""Code on Lightning's insides, which a release of it may change; nothing that knows rounds or contributions."""
