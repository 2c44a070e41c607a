"""All that touches RQ: claims, leases, recovery, the end of a job."""
