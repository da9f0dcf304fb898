"""What a run says of itself: metrics, the dashboard and the summary."""
