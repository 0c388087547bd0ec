"""Facts as data: each folder holds one kind, with its source in every row, and a few lines that look a row up."""
