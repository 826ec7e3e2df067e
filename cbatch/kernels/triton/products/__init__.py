"""Products of matrices: of numbers, of what is kept in 8 and 4 bits, and of experts."""
