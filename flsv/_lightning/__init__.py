"""Code that uses private interfaces of Lightning, which any release may change. Nothing here knows contributions."""
