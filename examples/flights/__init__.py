"""An example with a year of real flights. Spark joins them, and another process reads them over every transport."""
