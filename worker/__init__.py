"""The process that owns one model: intake, scheduler, engine, output, publisher."""
