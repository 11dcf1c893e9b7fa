"""What lets a run be repeated in its own process: copies of its objects, and its program's state and files put back.

Tier: provisional.
"""
