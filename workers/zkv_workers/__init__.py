"""What a training loop embeds: a worker's session and its drivers; knows nothing of brokers."""
