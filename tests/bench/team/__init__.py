"""A team of two models that learn in one episode (`make team`)."""
