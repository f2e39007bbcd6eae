"""The zkv command: reads configuration and starts roles; decides nothing about training."""
