"""What time and memory an answer would take on a real GPU: prices, prefix cache, batches, and the clock they run by."""
