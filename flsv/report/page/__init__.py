"""A run as a page to hand out, in HTML and Markdown."""
