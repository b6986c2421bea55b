"""What was asked and answered: the steps, the answer, and the page that shows them."""
