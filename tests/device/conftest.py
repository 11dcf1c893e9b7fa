"""The emulated accelerator registers itself with torch when it is imported: never only to look for doctests."""

collect_ignore = ["emulated.py", "on_emulated.py"]
