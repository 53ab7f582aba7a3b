"""What a stage does differently from the layers it is made of: BatchNorm over micro-batches."""
