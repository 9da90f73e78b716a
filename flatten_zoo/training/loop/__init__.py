"""What learns: model, optimizer, precision, and the loop over batches."""
