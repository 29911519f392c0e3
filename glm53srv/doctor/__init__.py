"""What this machine can run, and why: findings that `doctor` prints and `serve` heeds before it loads."""
