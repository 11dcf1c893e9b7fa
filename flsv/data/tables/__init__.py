"""Tables: how they are read, what their columns hold, and how rows become features and targets."""
