#include "surogate/library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <stdexcept>

namespace surogate {
namespace {

std::mutex directories_mutex;
std::vector<std::string> library_directories;

std::vector<std::string> split(const char* text) {
    std::vector<std::string> parts;
    std::string all = text ? text : "";
    for (size_t start = 0; start < all.size();) {
        const size_t end = std::min(all.find(':', start), all.size());
        if (end > start) {
            parts.push_back(all.substr(start, end - start));
        }
        start = end + 1;
    }
    return parts;
}

std::string last_error() {
    const char* text = dlerror();
    return text ? text : "unknown error";
}

Library load(const std::string& path, const char* package) {
    if (Library handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        return handle;
    }
    throw std::runtime_error(path + " does not load: " + last_error() + ". Reinstall it: pip install --force-reinstall " +
                             package);
}

// Loads the library from the first folder that contains it. Returns null if none does.
Library load_from(const std::vector<std::string>& folders, const char* soname, const char* package) {
    for (const std::string& folder : folders) {
        const std::string path = folder + "/" + soname;
        if (access(path.c_str(), F_OK) == 0) {
            return load(path, package);
        }
    }
    return nullptr;
}

std::string join(const std::vector<std::string>& parts) {
    std::string joined;
    for (const std::string& part : parts) {
        joined += (joined.empty() ? "" : ", ") + part;
    }
    return joined.empty() ? "none" : joined;
}

std::string dotted(size_t version) {
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
}

size_t version_of(Library library, const char* function) { return symbol<size_t (*)()>(library, function)(); }

}  // namespace

void set_library_dirs(std::vector<std::string> directories) {
    const std::lock_guard<std::mutex> lock(directories_mutex);
    library_directories = std::move(directories);
}

Library library(const char* soname, const char* package) {
    std::vector<std::string> installed;
    {
        const std::lock_guard<std::mutex> lock(directories_mutex);
        installed = library_directories;
    }
    const std::vector<std::string> requested = split(std::getenv("SUROGATE_LIBRARY_PATH"));
    if (Library handle = load_from(requested, soname, package)) {
        return handle;
    }
    if (Library handle = dlopen(soname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) {
        return handle;
    }
    if (Library handle = load_from(installed, soname, package)) {
        return handle;
    }
    if (Library handle = dlopen(soname, RTLD_NOW | RTLD_LOCAL)) {
        return handle;
    }
    throw std::runtime_error(std::string(soname) + " was not found (" + last_error() +
                             "). Searched SUROGATE_LIBRARY_PATH: " + join(requested) +
                             "; the installed packages: " + join(installed) +
                             "; the loader's search path. To install it: pip install " + package);
}

void* address(Library library, const char* name) {
    if (void* function = dlsym(library, name)) {
        return function;
    }
    throw std::runtime_error(path_of(library) + " has no function " + name);
}

std::string path_of(Library library) {
    link_map* map = nullptr;
    return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "unknown path";
}

Library at_least(size_t minimum, Library library, const char* function, const char* package) {
    const size_t version = version_of(library, function);
    if (version < minimum) {
        throw std::runtime_error(path_of(library) + " has version " + dotted(version) + ", but " + dotted(minimum) +
                                 " or later is needed: pip install --upgrade " + package);
    }
    return library;
}

LibraryInfo describe_library(const char* name, const std::function<Library()>& load, const char* version_function) {
    LibraryInfo info;
    info.name = name;
    try {
        const Library library = load();
        info.path = path_of(library);
        info.version = dotted(version_of(library, version_function));
    } catch (const std::exception& error) {
        info.error = error.what();
    }
    return info;
}

}  // namespace surogate
