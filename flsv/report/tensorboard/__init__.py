"""A run in TensorBoard: scalars, pictures, texts, the layout of its charts."""
