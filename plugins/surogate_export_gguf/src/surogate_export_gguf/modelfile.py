def text_of(context, name):
    return f"FROM ./{name}\n"
