"""TPC-H: Spark asks, Polars, DuckDB and a batch loader go on with the data at once, each in a process of its own.

python -m examples.tpch --scale 0.01       # or: make demo SCALE=0.01
"""
