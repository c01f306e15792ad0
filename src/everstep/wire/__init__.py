"""What travels between processes: message types and the channels that carry them. No torch."""
