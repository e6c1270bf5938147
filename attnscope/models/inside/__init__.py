"""Inside a model: its stream, projections and what each part writes."""
