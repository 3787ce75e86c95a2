"""What a person sees while a run goes on: whose terminal it is, the line that is drawn on it, and words for silence."""
