"""RQ's books: what each transition of a job writes there, in transactions of ours."""
