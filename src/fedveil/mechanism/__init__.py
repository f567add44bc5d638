"""What a release is, what it costs, and how its noise comes about: integers of numpy; importing this room loads no torch."""
