"""Sockets and loops that brokers and workers share; knows no policy and no parameter."""
