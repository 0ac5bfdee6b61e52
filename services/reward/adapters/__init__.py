"""Worker processes and the libraries used inside them."""
