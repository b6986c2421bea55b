"""One engine: requests, answers, retries and what each prompt cost."""
