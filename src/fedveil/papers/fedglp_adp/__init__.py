"""FedGLP-ADP: personalised masks, adaptive clipping and noise."""
