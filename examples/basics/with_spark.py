"""Write a DataFrame from Spark's tasks into your node on this host, read it without Spark, and read it back."""

import dissociated as dis
from dissociated.spark import session

spark = session(master="local[2]")
df = spark.range(1000).selectExpr("id", "id % 3 AS remainder")
df.write.format("dissociated").mode("overwrite").save("numbers")  # or .option("catalog", uri)

with dis.connect() as client:
    numbers = client.dataset("numbers")
    print(numbers.to_polars().group_by("remainder").len().sort("remainder").rows())

again = spark.read.format("dissociated").load("numbers")
print(again.where("remainder = 1").count())
spark.stop()
