"""Integrations with training libraries; each module requires its library and is imported separately."""
