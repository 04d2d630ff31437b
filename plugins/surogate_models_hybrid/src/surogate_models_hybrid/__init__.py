"""Hybrid models for Surogate: linear attention by the gated delta rule in most layers."""
