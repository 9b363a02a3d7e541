"""Everything that measures: load generators, benchmarks, reports. Speaks HTTP, or calls model for engine benchmarks."""
