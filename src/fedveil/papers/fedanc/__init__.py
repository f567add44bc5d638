"""FedANC: an LSTM schedules sparse noise."""
