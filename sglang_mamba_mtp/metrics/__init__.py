"""What a running server tells of itself: in its log's first line, in ``/server_info``, and as Prometheus metrics."""
