"""A plugin of Surogate"""
