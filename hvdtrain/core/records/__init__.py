"""What happened in a run, as one stream of records: the schema, who gets which."""
