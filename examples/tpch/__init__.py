"""An example with TPC-H: Spark publishes data, and Polars, DuckDB and a batch loader use them at once.

python -m examples.tpch --scale 0.01       # or: make demo SCALE=0.01
"""
