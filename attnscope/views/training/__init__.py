"""Pictures and tables of trainings."""
