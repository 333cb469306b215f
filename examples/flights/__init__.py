"""A year of real flights: Spark joins them, another process reads them over every transport."""
