"""What is seen of a run: metrics rows, the live view, and the forecast beside what was measured. It changes nothing."""
