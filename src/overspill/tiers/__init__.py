"""The tiers that training state lives in: host memory under a hard budget, and a versioned store on disk."""
