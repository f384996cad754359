"""What several tests share: ranks, pools of processes, invented results, a browser."""
